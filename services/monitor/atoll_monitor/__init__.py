"""The monitor: it watches one run and tells others, as metrics, files, traces and a page. It can only read."""
