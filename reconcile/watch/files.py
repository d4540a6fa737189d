"""Tells which of some files changed; editors that replace a file by another are understood."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from watchfiles import watch


class FileWatcher:
    """Watches files from a thread of its own.

    The folders are watched, not the files: many editors write a new file and rename it.
    """

    def __init__(self) -> None:
        self._changes: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._files: frozenset[Path] = frozenset()

    def follow(self, files: tuple[Path, ...]) -> None:
        """Watch exactly these files from now on; equal sets change nothing."""
        wanted = frozenset(file.resolve() for file in files)
        if wanted == self._files:
            return
        self.close()
        self._files, self._stop = wanted, threading.Event()
        folders = sorted({file.parent for file in wanted if file.parent.is_dir()})
        if folders:
            arguments = (wanted, folders, self._stop)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def changed(self) -> set[Path]:
        """Files that changed since the last call."""
        found = set()
        while not self._changes.empty():
            found.add(self._changes.get_nowait())
        return found

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self, files: frozenset[Path], folders: list[Path], stop: threading.Event) -> None:
        for changes in watch(
            *folders,
            watch_filter=lambda _, path: Path(path) in files,
            stop_event=stop,
            recursive=False,
            raise_interrupt=False,
            debounce=100,
            step=20,
        ):
            for _, path in changes:
                self._changes.put(Path(path))
