"""Carry out plans: bytes from file to file in bounded memory, with checksums, progress and clean failure."""
