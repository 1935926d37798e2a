"""`python -m llmnode.node`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among imports would end in a traceback
    from llmnode.node.cli import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
else:
    from llmnode.node.cli import run

run()
