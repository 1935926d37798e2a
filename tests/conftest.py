"""What holds for all tests."""

import signal

# A shell has what it starts in the background ignore Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
