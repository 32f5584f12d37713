"""Fakes of the ports, for simulations and tests: no model, no files, no real time.

Each runs on asyncio's time and draws what happens from a seeded `random.Random`, so that a schedule is a function of its seed under a
virtual clock (tests/sim). `Faults` says how often what goes wrong, at any await. Each fake keeps what it was told, for the test to
examine: they play the world around the orchestrator, and know nothing of its inside.
"""
