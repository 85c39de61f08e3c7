-- Messages that must leave because a transaction committed. Order inside a lane is the order of id; `Outbox.put`
-- holds a lock per lane until commit, so that a lower id can never become visible after a higher one.
CREATE TABLE outbox (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    lane          text        NOT NULL CHECK (lane <> ''),
    destination   text        NOT NULL CHECK (destination <> ''),
    payload       jsonb       NOT NULL,
    headers       jsonb       NOT NULL DEFAULT '{}',
    on_exhausted  text        NOT NULL CHECK (on_exhausted IN ('block', 'park')),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    available_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts      integer     NOT NULL DEFAULT 0,
    claimed_by    text,
    claimed_until timestamptz,
    last_error    text,
    delivered_at  timestamptz,
    parked_at     timestamptz,
    blocked_at    timestamptz
);

-- The relay finds the head of each lane here; delivered rows cost it nothing.
CREATE INDEX outbox_waiting ON outbox (lane, id) WHERE delivered_at IS NULL AND parked_at IS NULL;
CREATE INDEX outbox_delivered ON outbox (delivered_at) WHERE delivered_at IS NOT NULL;
CREATE INDEX outbox_parked ON outbox (parked_at) WHERE parked_at IS NOT NULL;
