"""The simulators held against published figures and against real processes."""
