"""The dashboards of cuzk-agent, as code. `make dashboards` writes them to `grafana/dashboards/`."""
