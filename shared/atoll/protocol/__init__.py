"""The protocol as pure state machines: facts in, commands out; no clock, socket, tensor or random number."""
