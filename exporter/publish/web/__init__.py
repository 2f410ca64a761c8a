"""The web server: routes, connections, passwords."""
