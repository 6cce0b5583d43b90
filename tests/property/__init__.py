"""Programs, models and graphs drawn at random by hypothesis, beside what plain torch makes of the same."""
