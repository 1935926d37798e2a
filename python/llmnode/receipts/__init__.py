"""Receipts that servers have signed: the book of a session, transcripts in files, and their audit."""
