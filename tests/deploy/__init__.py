"""The alerts, on what the agent showed."""
