"""The end of a run as data (`report.json`) and as one page without anything loaded from elsewhere (`report.html`)."""
