"""`vramcast classify`: from a request to a page for people, or to a line of JSON for each job."""
