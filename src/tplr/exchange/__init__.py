"""The objects that nodes exchange through buckets: updates, included sets, peer lists, checkpoints and reports."""
