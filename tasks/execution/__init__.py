"""Execution of stages: ranks and their launchers, jobs for other processes, runners. Models are in runtime."""
