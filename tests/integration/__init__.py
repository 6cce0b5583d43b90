"""What crosses packages, and whole programs."""
