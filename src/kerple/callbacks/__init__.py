"""What hooks evaluation into Lightning."""
