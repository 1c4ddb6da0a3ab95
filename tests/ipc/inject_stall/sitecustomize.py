"""Put on PYTHONPATH of a daemon by test_restart_watchdog.py: its event loop stands still from SIGUSR1 on.

Its other threads run on, and so does the one that pets the watchdog: it must notice by itself.
"""

import signal
import threading

signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
