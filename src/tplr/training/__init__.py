"""Building, training and measuring the model: mathematics only, no I/O, no await."""
