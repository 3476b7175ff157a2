"""Processes with limits on memory and time, for programs and files that are not trusted."""
