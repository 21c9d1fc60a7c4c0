"""The transport: one `Bus` interface, a JetStream adapter, an in-memory adapter and the embedded broker.

`open.open_bus` turns an address into a bus; services know nothing but `interface`.
"""
