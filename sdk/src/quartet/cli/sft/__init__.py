"""Supervised fine-tuning on a file of chats, through the trainer service."""
