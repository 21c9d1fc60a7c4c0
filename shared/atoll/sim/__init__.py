"""Virtual time, in which one seed decides everything: `engine` is its clock, each package here a world that lives by it."""
