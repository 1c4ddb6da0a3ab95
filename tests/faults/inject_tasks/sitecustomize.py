"""Put on PYTHONPATH of a daemon by test_supervision.py: what FAULTS_TASK names goes wrong once, on SIGUSR1.

    cancel:NAME   the task is cancelled by somebody who is not the supervisor
    raise:NAME    an exception inside of the task
    return:NAME   the task ends by itself
    stall:NAME    the task waits for something that never comes

and from the start, since it happens before anything could be told: stall:population, stall:verify-worker.
"""

import os

if what := os.environ.get("FAULTS_TASK"):
    import asyncio
    import signal
    import threading

    from kvd.server import app, population, supervise, verifier

    kind, _, name = what.partition(":")
    app.TICK_LATE_S, app.POPULATION_LATE_S, app.VERIFY_LATE_S = 2.0, 2.0, 0.5
    start = supervise.Supervisor.start

    class StrayError(Exception):
        """What a broken task raises."""

    def starting(self, task_name, run, **options):
        if task_name != name:
            start(self, task_name, run, **options)
            return
        loop = asyncio.get_running_loop()
        happened = asyncio.Event()
        runs = []

        async def once():
            runs.append(None)
            if len(runs) > 1:
                await run()
                return
            work = asyncio.ensure_future(run())
            event = asyncio.ensure_future(happened.wait())
            await asyncio.wait((work, event), return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if kind == "raise":
                raise StrayError("broken for a test")
            if kind == "stall":
                await asyncio.Event().wait()
            if kind == "cancel":
                self._tasks[name].cancel()
                await asyncio.Event().wait()

        start(self, task_name, once, **options)
        loop.add_signal_handler(signal.SIGUSR1, happened.set)

    supervise.Supervisor.start = starting

    if what == "stall:verify-worker":
        verifier._checksums = lambda items, views: threading.Event().wait(8) and []
    if what == "stall:population":
        populate = population.Population._tell
        steps = []

        def tell(self, call, *args):
            steps.append(None)
            if len(steps) > 1:
                self._stop.wait(30)
            populate(self, call, *args)

        population.Population._tell = tell
