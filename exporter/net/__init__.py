"""What every connection to the outside shares: TLS, URLs, secrets, errors, back-off."""
