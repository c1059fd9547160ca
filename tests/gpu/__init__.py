"""Tests of what the agent makes of NVML."""
