"""The end of a run as data (`report.json`) and as one page that loads nothing from elsewhere (`report.html`)."""
