"""The live page of runs: what it shows is made by pure functions, a feed sends it, plain scripts draw it."""
