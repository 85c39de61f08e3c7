-- Ticks that a person decided to go on without. The row outlives replays: such a tick is passed over again, until
-- somebody replays it by name, which takes the decision back.
CREATE TABLE skip (
    tick_id    text        PRIMARY KEY,
    project_id text        NOT NULL REFERENCES lane,
    sequence   bigint      NOT NULL,
    reason     text        NOT NULL,
    skipped_by text        NOT NULL,
    skipped_at timestamptz NOT NULL
);
CREATE INDEX skip_when ON skip (skipped_at);
