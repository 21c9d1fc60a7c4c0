"""Access to a broker: identities, their keys, and the doors that a broker keeps for them."""
