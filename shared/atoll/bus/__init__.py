"""How it travels: one `Bus` interface, a JetStream adapter, an in-memory adapter and the embedded broker.

`connect.open_bus` turns an address into a bus; `interface` is all that services know.
"""
