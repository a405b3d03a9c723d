"""What nodes hand to each other through buckets: updates, peer lists, start window, reports."""
