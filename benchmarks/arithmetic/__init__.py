"""Merging and encoding beside what memory allows."""
