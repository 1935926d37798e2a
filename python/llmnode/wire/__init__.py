"""Bytes to messages and back, and the session as a state machine. No clock, no socket, no tensor."""
