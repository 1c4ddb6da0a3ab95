"""The daemon: composition root, control socket, event runner, population, metrics, service manager.

    main.py        command line: serve, config check, version; exit codes
    app.py         puts the parts together, starts and stops them
    domain.py      one domain: META, POOL, core, namespaces; performs the core's effects
    runner.py      rings of the clients -> events -> replies
    clients.py     the life of a client: attach, detach, disconnect, death
    control.py     the unix socket: frames, descriptors, backpressure
    admin.py       what `call` can ask for
    population.py  pool memory in steps, in threads
    supervise.py   tasks, health
    metrics.py     the Prometheus endpoint
    notify.py      the service manager: readiness, watchdog, passed sockets
    keeping.py     who keeps descriptors over a restart (keeper.py: the process; names.py: what META does not say)
    adoption.py    starting over kept memory; ghosts.py: clients of the daemon before
    logs.py        structured logs and the audit log

Everything but population and the watchdog runs in one thread, on one event loop.
"""
