"""What servers signed: kept, written into transcripts, and checked."""
