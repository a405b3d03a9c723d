"""Uses a run's model: export, generation and evaluation; and replays the run's windows."""
