"""A run as a product: its model exported, generated from and evaluated, and its windows replayed."""
