"""The learner: one process per island; trains a replica and meets the others only through the bus."""
