"""A whole run on one machine: started, watched, drained and reported."""
