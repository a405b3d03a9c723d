"""Read-ahead, a worker pool and a semaphore for all packages; they do no I/O themselves."""
