"""Text and tokens: where they lie, which of them are meant, and how they become batches."""
