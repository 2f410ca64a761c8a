"""URLs as they are shown."""

import pytest

from exporter.net.urls import shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:p@h:1/metrics", "http://h:1/metrics"),
        ("https://h/m?token=x#y", "https://h/m"),
        ("http://[::1]:8000/metrics", "http://[::1]:8000/metrics"),
    ],
)
def test_a_shown_url_has_neither_credentials_nor_query(url, shown):
    """The path is what tells targets apart."""
    assert shown_url(url) == shown
