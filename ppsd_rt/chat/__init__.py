"""Chats with tools, for the server and for `Engine.chat`."""
