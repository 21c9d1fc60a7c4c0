"""Bytes and links: a round end to end, a poor link, the broker, the bandwidth that published systems need."""
