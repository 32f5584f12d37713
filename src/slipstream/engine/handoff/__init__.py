"""Handoff of finished KV blocks from a prefill engine to a decode engine. See docs/disaggregation.md.

messages    what is said over a connection, and how
segment     memory that two processes of one host share
exports     the prefill side inside the engine: copies blocks out while the forward pass goes on
listener    the prefill side on the network
client      the decode side on the network
peers       which prefill engines answer
"""
