"""From one description of a run's hub and regions: files for each place, and checks of what runs against it."""
