"""Studies of what decides memory and accuracy: the tables and pictures of README.md (`make study`)."""
