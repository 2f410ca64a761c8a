"""How results are shown: the exported metrics, the web server."""
