"""What all three packages stand on: records, errors, the digest."""
