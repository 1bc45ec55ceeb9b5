"""Third parties' OpenAI-compatible APIs as nodes: by TLS, with a key, at addresses that are theirs.

address.py      which addresses may be connected to
connection.py   TLS connections, kept between answers
legs.py         one request to such an API, as a leg like any other
"""
