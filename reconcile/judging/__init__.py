"""Two traces to rows with verdicts."""
