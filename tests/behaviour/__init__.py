"""What the product does, page by page of the documentation, by its public API alone."""
